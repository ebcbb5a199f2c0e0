"""The built-in kinds of model. Only this package and `device.py` import torch."""
