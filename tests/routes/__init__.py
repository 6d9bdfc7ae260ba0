"""Routes of the fuzzer, one topic per file."""
