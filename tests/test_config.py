"""Constructor arguments = attributes = config keys, for every optimizer."""

import inspect
import json

import keras
import numpy as np
import pytest
from saved import (
    OPTIMIZERS,
    each_delayed_optimizer,
    each_optimizer,
    least,
    optimizer_of,
)

import dp2_keras as dp2


@each_optimizer
def test_config_holds_the_constructors_arguments(name):
    arguments = OPTIMIZERS[name]
    optimizer = optimizer_of(name)
    assert optimizer.get_config() == arguments
    assert {key: np.asarray(getattr(optimizer, key)).tolist() for key in arguments} == arguments


@each_optimizer
def test_no_argument_is_forgotten(name):
    arguments = {
        parameter.name
        for base in getattr(dp2, name).__mro__
        if base.__module__.startswith("dp2_keras.optimizers") and "__init__" in vars(base)
        for parameter in inspect.signature(base.__init__).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "self"
    }
    assert set(OPTIMIZERS[name]) == arguments


@each_optimizer
@pytest.mark.parametrize("make", [optimizer_of, least])
def test_config_round_trip(name, make):
    optimizer = make(name)
    config = json.loads(json.dumps(optimizer.get_config()))
    again = type(optimizer).from_config(config)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()


@each_optimizer
def test_keras_serializes_it(name):
    optimizer = optimizer_of(name)
    for module in (keras.saving, keras.optimizers):
        serialize = getattr(module, "serialize_keras_object", None) or module.serialize
        deserialize = getattr(module, "deserialize_keras_object", None) or module.deserialize
        again = deserialize(json.loads(json.dumps(serialize(optimizer))))
        assert type(again) is type(optimizer)
        assert again.get_config() == optimizer.get_config()


@each_optimizer
def test_a_schedule_comes_back_as_a_schedule(name):
    rate = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
    optimizer = optimizer_of(name, learning_rate=rate)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert again.get_config()["learning_rate"]["config"] == rate.get_config()


@each_delayed_optimizer
def test_two_schedules_come_back_in_their_places(name):
    schedule = keras.optimizers.schedules.ExponentialDecay
    rates = dict(learning_rate=schedule(0.5, 10, 0.5), sgd_learning_rate=schedule(8.0, 10, 0.5))
    optimizer = optimizer_of(name, **rates)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    for argument, rate in rates.items():
        assert again.get_config()[argument]["config"] == rate.get_config()
    again.iterations.assign(10)
    assert float(again.sgd_learning_rate) == 4.0


@each_optimizer
def test_a_changed_rate_is_in_the_config(name):
    optimizer = optimizer_of(name, learning_rate=0.125)
    optimizer.learning_rate = 0.5
    assert optimizer.get_config()["learning_rate"] == 0.5
    if "sgd_learning_rate" in OPTIMIZERS[name]:
        optimizer.sgd_learning_rate = 2.0
        assert optimizer.get_config()["sgd_learning_rate"] == 2.0


@each_optimizer
def test_arguments_that_were_priced_cannot_change(name):
    optimizer = optimizer_of(name)
    free = {"learning_rate", "sgd_learning_rate", "name"}
    for argument, value in OPTIMIZERS[name].items():
        if argument not in free:
            with pytest.raises(AttributeError, match=f"`{argument}` is fixed .* Received: {argument}="):
                setattr(optimizer, argument, value)
    assert optimizer.get_config() == OPTIMIZERS[name]
