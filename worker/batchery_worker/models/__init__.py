"""The built-in kinds of model. Only this package and `device/` may import torch."""
