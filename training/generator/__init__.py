"""Text made by the project itself: story worlds and chats whose answers are true. A seed gives one chat."""
