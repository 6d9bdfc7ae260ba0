"""Properties of random programs: functions of a program and of how it runs, which raise where it is wrong."""
