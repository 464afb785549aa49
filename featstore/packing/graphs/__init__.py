"""Where edges come from, and the CSC that is made of them."""
