"""The plan of one iteration as data: layout, placement, operations, checks, drawing. Standard library only."""
