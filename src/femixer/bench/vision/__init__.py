"""`femixer bench vision`: vision models with FEM against the same model with plain attention."""
