"""The HTTP gateway through which agents talk to the policy, and the capture of their tokens."""
