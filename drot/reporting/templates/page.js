// Shows the linear that is chosen in a list. Without scripts every linear is a line that opens.
const linears = [...document.querySelectorAll("details.linear")];
if (linears.length > 1) {
  const label = document.createElement("label");
  const select = document.createElement("select");
  label.append("Linear: ", select);
  for (const linear of linears) {
    select.append(new Option(linear.querySelector("summary").textContent.trim()));
  }
  const show = () => linears.forEach((linear, index) => {
    linear.open = index === select.selectedIndex;
    linear.classList.toggle("unchosen", !linear.open);
    linear.classList.toggle("chosen", linear.open);
  });
  select.addEventListener("change", show);
  linears[0].before(label);
  show();
}
