"""One decoder and a table of families; weights loaded strictly."""
