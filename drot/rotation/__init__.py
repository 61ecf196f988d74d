"""Training of the orthogonal matrices that concentrate the importance of a layer's weights."""
