"""How to plan: values, cost model, program and search. Torch-free; usable on a laptop for a server elsewhere."""
