"""The CPU's operations in C, compiled on the machine that runs them; used by ``aserve_kernels.cpu`` only."""
