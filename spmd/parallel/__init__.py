"""Building blocks of parallel programs, one file each: functions that are called inside a `shard_map` body."""
