"""The tags of messages."""

import enum


class Tag(enum.IntEnum):
    """The tags of messages, in one place: those above 31990 travel on communicators of the user's."""

    PERMUTE = 0  # blocks of a `ppermute`
    STATE = 1  # reports to the watchdog
    COMPARISON = 2  # comparisons of calls and of values
    SHORT = 3  # persistent requests
    SWAP = 4  # operands of an all-reduce of two ranks
    ERROR = 31997  # the error of a rank that ends the job
    FAILED = 31998  # the error of a rank in a notebook's cell
    ARRIVED = 31999  # the arrival of a rank at a barrier of messages
