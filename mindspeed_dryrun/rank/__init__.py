"""What an activated Python process imports first. Standard library only: it shares a process with a training job."""
