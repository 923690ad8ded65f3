(() => {
  // Each card carries its place in every order; sorting is putting the cards in that order.
  const gallery = document.getElementById("gallery");
  const bar = document.getElementById("orders");
  if (!gallery || !bar) return;
  bar.hidden = false;
  bar.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const order = button.dataset.order;
    const cards = Array.from(gallery.children);
    cards.sort((a, b) => a.dataset[order] - b.dataset[order]);
    gallery.append(...cards);
    for (const other of bar.querySelectorAll("button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
})();
