"""The gradients of attention: dQ, dK and dV by one kernel, and two small ones around it."""
