"""What decides how early a free energy mixer learns a task? `femixer mad study` trains variants of its start.

Every job is trained until it has learned or for 4,000 steps, at the sizes and settings of the protocol `lite`, with one
learning rate. Variants of the same parts start, seed by seed, from the same weights where the variant does not say
otherwise, and see the same batches.
"""
