"""Planning of weight transfers: who sends which part of which tensor to whom, and in what order."""
