"""Routes of the fuzzer, one module a topic: functions that draw programs, as those of `tests/fuzz_routes.py`."""
