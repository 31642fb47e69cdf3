"""Forecasting: series from files, the windows of the paper's protocol, training, tables and forecasts.

The protocol is that of the SAMoVAR work (public code: LJC-FVNR/Structural-Aligned-Mixture-of-VAR), which the paper
follows; docs/forecast.md says what that means.
"""
