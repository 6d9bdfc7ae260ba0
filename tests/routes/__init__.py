"""Routes of the fuzzer, one module a topic: functions from a random generator to a script."""
