"""Tables and plots, which reports share."""
