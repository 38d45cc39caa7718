"""The parts of a decoder layer, built on kernels. Knows no request."""
