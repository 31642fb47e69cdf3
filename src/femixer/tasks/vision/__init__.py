"""Image classification: pictures from folders and data sets, augmentation, training, tables and posterior maps.

docs/vision.md says what is done by default and why.
"""
