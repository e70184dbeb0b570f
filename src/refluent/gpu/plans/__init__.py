"""Problem -> Plan: tile sizes, stages, warps and memory maps, as tables."""
