"""Inference: bounds, fits, streams of minibatches, files of parameters."""
