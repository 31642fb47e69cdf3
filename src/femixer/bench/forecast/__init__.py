"""`femixer bench forecast`: forecasters with FEM against the same forecaster with plain attention."""
