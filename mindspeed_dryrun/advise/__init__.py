"""What to change about a job, and what it would save."""
