#: Seconds after which what a test has started is taken to hang, however busy the machine is.
PATIENCE = 1000
