"""The demo of the sample ring: generators that die, a training that does not wait for them."""
