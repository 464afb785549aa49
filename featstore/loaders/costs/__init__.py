"""What each way to train would cost, and which one ``mode="auto"`` takes."""
