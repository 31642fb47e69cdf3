"""Operators that only rival mixers need, and recurrences made of torch's operations alone."""
