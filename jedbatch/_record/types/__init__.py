"""Node types, interned, and the operands that cells share."""
