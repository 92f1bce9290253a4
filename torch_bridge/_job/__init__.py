"""What runs inside a torch job."""
