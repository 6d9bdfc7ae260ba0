"""What a mesh is: its ranks and axes, partition specs, and how programs on ranks are started."""
