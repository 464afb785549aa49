"""What is the cheapest set of reads: extents, their price, and what a memory budget leaves. Pure: no input or
output."""
