"""``refluent demo``: trains a small language model on the text behind Python's help(), checks it, writes a report."""
