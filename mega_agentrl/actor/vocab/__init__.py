"""Log-prob and entropy over a vocabulary that is split over tensor-parallel ranks."""
