"""What a program is made of: its sites, its rows, and what it does with them."""
