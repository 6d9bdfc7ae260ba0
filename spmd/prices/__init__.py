"""Prices of programs: cost models of machines and networks, and the walks along tapes that ask them."""
