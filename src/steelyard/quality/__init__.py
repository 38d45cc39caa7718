"""Whether a faster arm still answers as well: the gate that goes with a claim of speed. Knows no server."""
