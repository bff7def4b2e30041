"""One model for everybody: what is judged is its accuracy on the global test set."""
