"""A private step for a plain Keras model, compiled with a private optimizer.

    g_i = d loss[i] / d w,   from the unreduced loss vector of a real batch

Keras's own `train_step` runs the whole batch at once, so that loss[i] must be shown to
depend on example i alone: every layer and operation must be one that treats examples
apart. Where that, or the vector, is missing, the step raises and nothing changes. The ledger of the layers
counts it; `make_private(model).ledger` has it.
"""

import tensorflow as tf

from dp2_keras import _keras, validation
from dp2_keras.account import plain_account
from dp2_keras.errors import NonPrivateUpdateError
from dp2_keras.per_example.mapping import map_examples
from dp2_keras.privatizer import ClippedSum

HOW_TO_TRAIN = (
    "This update did not come from the privatizer, so it was not made. Train through "
    "`model = dp2_keras.make_private(model)` with `compile` and `fit`; or compile a plain model "
    "with a loss of `reduction='none'` and `jit_compile=False`, and call its `fit`."
)


def private_step(optimizer, loss, variables, tape) -> None:
    """Trains a stock model by one private step, or raises.

    Args:
        optimizer: a `PrivateOptimizer`.
        loss: what Keras was about to differentiate.
        variables: the trainable variables.
        tape: the gradient tape, where Keras hands it over (Keras 2), else None.

    Raises:
        NonPrivateUpdateError: if this is not Keras's own `train_step`, if the loss is
            not one number per example, or if XLA or eager mode hide the graph.
        ValueError: if the model may mix examples or write state.
    """
    running = _keras.stock_train_step()
    if running is None or loss is None:
        raise NonPrivateUpdateError(HOW_TO_TRAIN)
    model, data = running
    try:
        _check(model, data, loss, tape)
        with tf.control_dependencies([_counted(model, optimizer)]):
            query = optimizer.begin_step(variables)
            gradients = _per_example_gradients(loss, [_keras.native(v) for v in variables], tape)
            optimizer.finish_step(ClippedSum(query, _clip(query, gradients, data)))
    except Exception:
        model.train_function = None  # TensorFlow may call a half-traced function empty.
        raise


def _counted(model, optimizer):
    """Counts the step in the ledger of the layers, in full: how the batch was drawn is not known."""
    with tf.init_scope():  # While the step is traced, once.
        account = plain_account(_keras.flatten_layers(model), optimizer)
        account.idle(optimizer)
    with tf.control_dependencies([account.meter.gate(optimizer.ticket)]):
        return account.meter.count()


def _check(model, data, loss, tape):
    if loss.shape.rank != 1:
        raise NonPrivateUpdateError(
            "The loss must be a vector, one number per example, for a plain Keras model to be "
            "trained privately: compile with a loss of `reduction='none'`, or wrap the model with "
            f"`dp2_keras.make_private(model)`. Received: a loss of shape {loss.shape}"
        )
    if model.jit_compile or (tape is None and tf.executing_eagerly()):
        raise NonPrivateUpdateError(
            "A plain Keras model must be compiled with `jit_compile=False` and "
            "`run_eagerly=False` to be trained privately, or wrapped with "
            f"`dp2_keras.make_private(model)`. Received: jit_compile={model.jit_compile}, "
            f"run_eagerly={model.run_eagerly}"
        )
    validation.check_stock_model(model, data)
    if not tf.nest.flatten(data)[0].shape[:1].is_compatible_with(loss.shape):
        raise NonPrivateUpdateError(_WRONG_LENGTH)


_WRONG_LENGTH = (
    "The loss must be a vector with one number per example. Reduce all other axes, or wrap the "
    "model with `dp2_keras.make_private(model)`."
)


def _per_example_gradients(loss, variables, tape):
    if tf.executing_eagerly():
        gradients = tape.jacobian(loss, variables, unconnected_gradients="zero")
        return [tf.convert_to_tensor(g) for g in gradients]

    def gradients_of(index):
        gradients = tf.gradients(padded[index], variables, unconnected_gradients="zero")
        return [tf.convert_to_tensor(g) for g in gradients]

    count = tf.shape(loss)[0]
    padded = tf.pad(loss, [[0, tf.maximum(1 - count, 0)]])  # A map wants one element at least.
    gradients = map_examples(gradients_of, tf.range(tf.shape(padded)[0]))
    return [g[:count] for g in gradients]


def _clip(query, gradients, data):
    """The clipped sum, if there was a gradient per example."""
    count, drawn = tf.shape(gradients[0])[0], tf.shape(tf.nest.flatten(data)[0])[0]
    with tf.control_dependencies([tf.debugging.assert_equal(count, drawn, _WRONG_LENGTH)]):
        gradients, mask = [tf.identity(g) for g in gradients], tf.ones([count], tf.bool)
        values, _ = query.each(lambda one: one.clip(gradients, mask))
    return values
