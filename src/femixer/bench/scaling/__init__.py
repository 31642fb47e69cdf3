"""`femixer bench scaling`: how time per token, memory and decoding change with the length."""
