"""What the deadlock watchdog leaves behind when it has looked at the threads of a program."""

import gc
import threading
import weakref

import numpy as np

from collectives.guards.deadlock import Watchdog


def test_looking_at_threads_keeps_none_of_their_values():
    watchdog, looked = Watchdog(lambda text, code: None), []

    def program():
        dropped, last = np.ones(3), np.ones(3)
        refs = weakref.ref(dropped), weakref.ref(last)
        threading.Thread(target=lambda: looked.append(watchdog._waiting_calls()), daemon=True).start()
        while not looked:
            pass
        del dropped
        assert refs[0]() is None
        return refs[1]

    gc.disable()
    try:
        assert program()() is None
    finally:
        gc.enable()
