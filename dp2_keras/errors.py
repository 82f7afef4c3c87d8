"""Errors whose type a caller may want to catch."""


class NonPrivateUpdateError(Exception):
    """A weight update was asked for that did not pass through the privatizer.

    It is raised before anything changes. The message names the fix.
    """


class BudgetExhaustedError(Exception):
    """A step was asked for that the privacy budget cannot pay.

    It is raised before anything changes. The message says what was spent.
    """
