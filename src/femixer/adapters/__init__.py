"""FEM in the models of other libraries, through the places where those let one in."""
