"""Who the peers of a call are, the memory they share, and whether they can run natively."""
