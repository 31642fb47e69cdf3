"""`femixer bench layer`: one FEM layer against one softmax attention layer with as many parameters."""
