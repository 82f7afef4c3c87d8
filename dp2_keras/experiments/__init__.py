"""The paper's experiments, end to end: `python -m dp2_keras.experiments`, or `dp2 reproduce`.

    experiment = settings x methods x hyper-parameters x seeds
    row        = train(task, method, hyper-parameters, seed, epochs, batch size, sigma)

    task            data, model, loss, metric, trivial predictors                 tasks.py
    method          an optimizer and the grid it is searched over                 methods.py
    configuration   a table or figure of the paper, with what it prints           configurations/*.json
    search          random points of the grid, chosen by a training metric        search.py
    pool, store     runs side by side; rows in one file, so that a sweep resumes  pool.py, store.py
    report          tables beside the paper's, figures, CSV and JSON              report.py, plots.py

To add a method or a task is to add one entry to its registry. Nothing here is imported by the rest of the
package, and TensorFlow is loaded by the first run, not before.
"""
