"""Routes of the fuzzers, by topic: functions that draw programs."""
