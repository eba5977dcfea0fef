"""Language models outside of the run that judge answers, and read where verification asks them."""
